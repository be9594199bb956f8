"""Completion of commands and flags in a shell.

The words are those of the parts that are installed, written into the script when it is printed, so
that the shell starts no Python at each key.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

_BASH = """\
_hetertrain() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} pair="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" words
  case $pair in
{pairs}
    *) case ${{COMP_WORDS[1]}} in
{firsts}
    *) words={commands};;
    esac;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words={commands}; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _hetertrain hetertrain
"""


def bash_completion(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return a script for bash, and for zsh with ``bashcompinit``; ``parsers`` are by command."""
    seconds: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    for name, parser in parsers.items():
        first, _, second = name.partition(" ")
        seconds.setdefault(first, [])
        if second:
            seconds[first].append(second)
        flags[name] = [
            option
            for action in parser._actions
            for option in action.option_strings
            if option.startswith("--")
        ]
    pairs = [_case(name, flags[name]) for name in flags if " " in name]
    firsts = [_case(first, [*words, *flags.get(first, [])]) for first, words in seconds.items()]
    return _BASH.format(
        pairs="\n".join(pairs), firsts="\n".join(firsts), commands=_quoted(list(seconds))
    )


def _case(pattern: str, words: list[str]) -> str:
    return f"    {shlex.quote(pattern)}) words={_quoted(words)};;"


def _quoted(words: list[str]) -> str:
    return shlex.quote(" ".join(words))
