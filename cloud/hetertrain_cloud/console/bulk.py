"""One action on many nodes, and how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetertrain_cloud.console import words
from hetertrain_cloud.console.client import ProblemAnswer
from hetertrain_cloud.console.view import View


async def act_on_nodes(
    view: View,
    action: str,
    nodes: Sequence[str],
    labels: Mapping[str, str | None] | None = None,
    done: str = "",
) -> bool:
    """Carry an action out on each of the nodes, and say how it went; False: nothing was done."""
    order: dict[str, object] = {"action": action, "nodes": list(nodes)}
    if labels is not None:
        order["labels"] = labels
    try:
        answer = await view.api.send("POST", "/nodes/actions", order)
    except ProblemAnswer as problem:
        view.say(problem.detail, is_bad=True)
        return False
    refused = [result for result in answer["results"] if not result["is_done"]]
    num_done = len(answer["results"]) - len(refused)
    if refused:
        first = refused[0]
        text = f"Done for {num_done}; refused for {len(refused)}: {first['node']}: "
        view.say(text + first["detail"], is_bad=True)
    else:
        view.say(done or f"Done for {words.many(num_done, 'node')}.")
    return True
