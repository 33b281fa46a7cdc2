"""`shoal completion`: print a script by which a shell completes verbs, options and settings.

The words are those of the parsers, so the script knows what this version of Shoal has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from shlex import quote
from typing import NamedTuple

HELP = "print a script by which a shell completes verbs, options and settings"
EXAMPLES = """\
  shoal completion bash          in ~/.bashrc: source <(shoal completion bash)
  shoal completion zsh           in ~/.zshrc: source <(shoal completion zsh)
  shoal completion fish          into ~/.config/fish/completions/shoal.fish
"""
SHELLS = ("bash", "zsh", "fish")
BASH = """\
_shoal() {
    local word="${COMP_WORDS[COMP_CWORD]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="%(verbs)s"
    else
        case "${COMP_WORDS[1]}" in
%(options)s
        esac
        case "${COMP_WORDS[COMP_CWORD-1]}" in
%(values)s
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _shoal shoal
"""


class _Words(NamedTuple):
    """Words that a verb takes: options and settings, values of options, and arguments."""

    options: list[str]
    values: dict[str, list[str]]
    arguments: list[str]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    from shoal.cli.program import TAKES_SETTINGS, VERBS, parsers
    from shoal.config.fields import all_settings

    settings = [f"--{name}" for name in all_settings()]
    verbs = {
        name: _words_of(parser, settings if name in TAKES_SETTINGS else [])
        for name, parser in parsers()[1].items()
    }
    if options.shell == "fish":
        helps = {name: VERBS[name].HELP for name in verbs}
        print("\n".join(_fish(verbs, helps)))
        return 0
    if options.shell == "zsh":
        print("autoload -Uz compinit bashcompinit && compinit && bashcompinit")
    values = {option: each for words in verbs.values() for option, each in words.values.items()}
    print(
        BASH
        % {
            "verbs": " ".join(verbs),
            "options": _cases({n: [*w.options, *w.arguments] for n, w in verbs.items()}),
            "values": _cases(values),
        },
        end="",
    )
    return 0


def _words_of(parser: argparse.ArgumentParser, settings: list[str]) -> _Words:
    from shoal.strategies import STRATEGIES

    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    choices = {
        name: list(map(str, action.choices))
        for action in shown
        for name in action.option_strings or [""]
        if action.choices is not None
    }
    options = [name for action in shown for name in action.option_strings]
    options += [name for name in settings if name not in options]
    if "--strategy" in options:
        choices["--strategy"] = ["auto", *STRATEGIES]
    return _Words(options, choices, choices.pop("", []))


def _cases(words: dict[str, list[str]]) -> str:
    return "\n".join(f'        {name}) words="{" ".join(each)}" ;;' for name, each in words.items())


def _fish(verbs: dict[str, _Words], helps: dict[str, str]) -> Iterator[str]:
    for name, words in verbs.items():
        yield f"complete -c shoal -n __fish_use_subcommand -a {name} -d {quote(helps[name])}"
        after = f"complete -c shoal -n '__fish_seen_subcommand_from {name}'"
        for option in words.options:
            kind = "-l" if option.startswith("--") else "-s" if len(option) == 2 else "-o"
            values = f" -x -a '{' '.join(words.values[option])}'" if option in words.values else ""
            yield f"{after} {kind} {option.lstrip('-')}{values}"
        if words.arguments:
            yield f"{after} -a '{' '.join(words.arguments)}'"
