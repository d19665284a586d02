"""Words that the house rules refuse, and where words stand: in names, comments, texts and scripts."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Words of our own for things that the field has a name for, and the name. A part of an identifier is compared.
PRIVATE_NAMES = {
    "aside": "offload, strand", "asked": "requested", "askers": "requesters", "away": "unavailable, down",
    "believe": "adopt, trust", "blow": "fault event", "burial": "dead letter", "bury": "dead-letter",
    "company": "peers", "crew": "processes", "doom": "crash plan", "ensemble": "in-process", "farewell": "departure",
    "farm": "node pool", "fate": "plan", "grove": "provider trees", "guilty": "responsible", "hasten": "flush",
    "hear": "receive, listen", "heard": "received, last seen", "hurry": "at once", "hush": "redirect logs",
    "insist": "retry", "insistence": "retry", "judge": "filter, check, assess", "knock": "offer", "mend": "repair",
    "news": "events, changes", "nobody": "none", "noted": "recorded", "obeyed": "accepted", "outcast": "excluded",
    "ripen": "flush", "saboteur": "fault injector", "said": "sent, event, reason", "say": "send, publish, print",
    "scene": "deployment", "somebody": "a role", "stock": "inventory", "stories": "timelines", "story": "timeline",
    "stranger": "foreign, malformed", "street": "cluster, pipeline", "tell": "publish, log, print",
    "told": "sent, requested", "twin": "duplicate", "undead": "survived its destruction", "unheard": "unreported",
    "unspoken": "missing", "voice": "announcer", "weather": "faults",
}  # fmt: skip
# A role can be named instead of each of these: the client, the scheduler, another process, the operator.
PRIVATE_PROSE = re.compile(r"\b(nobody|somebody|everybody|anybody|whoever|whomever)\b", re.IGNORECASE)
# Programs report, publish, answer, request, receive, trust.
CONVERSATION = re.compile(
    r"\b(said|says?|told|tells?|asks|hears?|heard|speaks?|spoken|believes?|believed)\b", re.IGNORECASE
)
# A sentence names its subject: "The rows that a claim needs", not "What a claim needs". A question may begin so, and so
# may a heading of a page or the text of a link.
NO_SUBJECT = re.compile(r"(?:^[^\w\[\n]*|[.:!] )(?:What|Whose|Those|Who) (?!.*\?)", re.MULTILINE)


@cache
def words_of(name: str) -> tuple[str, ...]:
    """The words of an identifier, in lower case: of `camelCase`, `snake_case` and `CONSTANTS`."""
    return tuple(re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()))


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """The comments of a shell script, and what it prints."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or "report " in line:
            yield number, line


def prose(path: Path, refused: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """The lines of a source that have a comment or a text, those parts alone; none where nothing of it is refused."""
    source = path.read_text()
    if not refused.search(source):  # to take a source apart costs a hundred times as much
        return
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and not token.string.strip("\"'").isidentifier():
            first, last = token.start[0], token.end[0]
            yield from (
                ((first, token.string),)
                if first == last
                else ((number, lines[number - 1]) for number in range(first, last + 1))
            )
