"""What the site makes at build time: the command line from its parser, links to files outside docs/, and formulas."""

import re
import warnings
from argparse import Action
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import tyro
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tyro.conf import FlagCreatePairsOff

from ccfa import cli

# Pages of the site that include a file of the repository: a link to the file leads to the page.
INCLUDED = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "REPRODUCTION.md": "reproduction",
    "benchmarks/RESULTS.md": "measurements",
}


def option_row(action: Action) -> str:
    """One row of a table: what is typed, and what it means."""
    value = re.sub(r"^\{None\}\|", "", str(action.metavar or "")).replace("{None,", "{")
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    typed = f"{names} `{value}`" if names and value else names or f"`{value or action.dest}`"
    meaning = re.sub(r" \((default: (None|False|True)?|required)\)$", "", action.help or "")
    return "| " + " | ".join(text.replace("|", r"\|").replace("<", r"\<") for text in (typed, meaning)) + " |"


def command_lines(verb: Any) -> Iterator[str]:
    """A section of the reference: a verb with its arguments and options."""
    name = verb.__name__.lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is no other way to ask tyro for a parser
        parser = tyro.extras.get_parser(verb, config=(FlagCreatePairsOff,))
    actions = [action for action in parser._actions if action.dest != "help"]
    arguments = [action for action in actions if not action.option_strings]
    shown = " ".join(str(action.metavar or action.dest) for action in arguments)
    yield from (f"## ccfa {name}", "", str(parser.description), "", f"    ccfa {name} {shown}".rstrip(), "")
    if actions:
        yield from ("| argument or option | meaning |", "|---|---|")
        yield from map(option_row, sorted(actions, key=lambda action: bool(action.option_strings)))
    yield ""


class Commands(SphinxDirective):
    """Every verb of the command line."""

    def run(self) -> list[nodes.Node]:
        """Parse the sections as if they stood on the page."""
        text = "\n".join(line for verb in get_args(cli.Verb) for line in command_lines(verb))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def lead_to_pages(app: Sphinx, name: Any, *rest: Any) -> None:
    """Turn links to included files into links to their pages, and links to folders into text."""
    content = rest[-1]
    for path, page in INCLUDED.items():
        content[0] = re.sub(rf"\]\((?:\.\./)*(?:docs/)?{re.escape(path)}", f"](/{page}.md", content[0])
    content[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./)*results/[^)]*\)", r"\1", content[0])


def write_formula(translator: Any, node: nodes.Element) -> None:
    """Formulas are MathML, which browsers draw by themselves, without a script from another server."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def strip_annotations(app: Sphinx, function: Any, bound: bool) -> None:
    """Show types as Python has them, without what they tell the command line."""
    with suppress(NameError, TypeError, AttributeError):
        function.__annotations__ = get_type_hints(function)


def name_defaults(app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returns: str) -> Any:
    """Write defaults that are functions by their names, so that the signature is Python and its types are links."""
    if not signature:
        return None
    return re.sub(r"<function (\w+)>", r"\1", signature).replace("<factory>", "..."), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("autodoc-before-process-signature", strip_annotations)
    app.connect("autodoc-process-signature", name_defaults)
    app.connect("source-read", lead_to_pages)
    app.connect("include-read", lead_to_pages)
    return {"parallel_read_safe": True}
