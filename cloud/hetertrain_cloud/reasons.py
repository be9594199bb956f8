"""What the reasons mean for which an aggregator refuses updates and frames, and what to do about
each: one place for API, console and docs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """A reason in words that an operator understands."""

    text: str
    advice: str
    is_usual: bool = False
    """It happens where all is well, and needs nobody."""


_VERSIONS_DIFFER = "Update the node's software, or the cloud's: they speak different protocols."
_DAMAGED = "It is sent again by itself; where it comes often, look at the node's link and its disk."
_HOSTILE = (
    "A node of ours does not do this: if it goes on, revoke the node and look at what runs on it."
)

EXPLANATIONS: dict[str, Explanation] = {
    "layout": Explanation(
        "The update is of another model: its parameters are not those of the job.",
        "Give the node the same task, of the same release, as the job has.",
    ),
    "lineage": Explanation(
        "The update started from a run of the job that has ended, as by a rollback.",
        "Nothing: the node takes the present model and goes on from there.",
        is_usual=True,
    ),
    "counts": Explanation(
        "The update names no examples or no steps, or implausibly many.",
        "Look at the number of examples that the node's task or training loop gives.",
    ),
    "base_ahead": Explanation(
        "The update started from a version that the cloud does not have yet.",
        "Rare after a damaged journal; if it goes on, the node holds a model of another cloud.",
    ),
    "lag": Explanation(
        "The update started from a version that is too old by now.",
        "The node keeps its work, damped, and sends it again. If many are late, let the job cut "
        "less often, or put slow nodes behind a gateway.",
    ),
    "payload": Explanation(
        "The update's numbers could not be decoded.",
        "Update the node's software; if it goes on, look at the node's memory and disk.",
    ),
    "non_finite": Explanation(
        "The update had values that are not numbers, or infinite.",
        "Look at the vehicle's data, and lower the learning rate.",
    ),
    "too_large": Explanation(
        "A parameter moved further than any training does.",
        "Look at the vehicle's data, and lower the learning rate.",
    ),
    "norm": Explanation(
        "The update as a whole is many times larger than the fleet's usual one.",
        "Look at the vehicle's data and learning rate. If many vehicles are refused, their "
        "training differs from the others'; one vehicle may be poisoned: revoke it.",
    ),
    "full": Explanation(
        "The version, or the gateway's store, had no more room.",
        "The node sends it again. Let the job cut more often.",
    ),
    "known": Explanation(
        "A gateway's partial had updates in it that were merged before, by another way.",
        "Nothing: the gateway sends it again without them.",
        is_usual=True,
    ),
    "partial": Explanation(
        "A gateway's partial does not fit together, or a gateway was sent one.",
        "Update the gateway's software. If it goes on, do not trust it: revoke it.",
    ),
    "content": Explanation(
        "What arrived is no update, is damaged, or is in another node's name.", _HOSTILE
    ),
    "frame_foreign": Explanation(
        "Something was sent that is not of this protocol.",
        "Look for another program that publishes on the fleet's topics.",
    ),
    "frame_version": Explanation("A message was of another protocol version.", _VERSIONS_DIFFER),
    "frame_kind": Explanation("A message was of an unknown kind.", _VERSIONS_DIFFER),
    "frame_length": Explanation("A message was cut short, or too long.", _DAMAGED),
    "frame_digest": Explanation("A message was damaged on its way.", _DAMAGED),
    "frame_header": Explanation("A message had a field that cannot be.", _VERSIONS_DIFFER),
    "frame_identity": Explanation("A node sent a message in another node's name.", _HOSTILE),
    "frame_signature": Explanation(
        "What a node announced is not signed with that node's key.",
        "Let the node enrol again if its key was made anew. If it goes on, somebody else sends "
        "in its name: revoke it.",
    ),
    "frame_direction": Explanation("A node sent what only an aggregator may send.", _HOSTILE),
    "frame_tier": Explanation("A node named a tier that the job does not have.", _VERSIONS_DIFFER),
    "frame_size": Explanation(
        "A node announced an update that is larger than the job's model can make it.",
        "Give the node the task that the job has.",
    ),
    "frame_chunk": Explanation("A chunk did not fit the transfer that it is of.", _DAMAGED),
    "frame_content": Explanation("A message was not of the kind that was due.", _VERSIONS_DIFFER),
}


def explanation(reason: str) -> Explanation:
    """Return what a reason means; one of a later release has no explanation here."""
    unknown = Explanation("A reason of another release.", "See the aggregator's log.")
    return EXPLANATIONS.get(reason, unknown)
