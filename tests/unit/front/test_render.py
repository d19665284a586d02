"""The output for a person: nothing cut off, nothing that controls the terminal behind their back."""

from __future__ import annotations

import io
import uuid

from rich.console import Console
from rich.text import Text

from berth.client import Track
from berth.commands.instances import show_tracks
from berth.load import Failure
from berth.render import counted, printable, render_rows, render_scores, render_stages
from bus.contracts.build import BuildEvent, BuildState, FunnelStep, HostScore
from bus.contracts.stages import Stamps
from lab.demo.run import render_failures


def shown(render, width: int = 20) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_columns_line_up_and_are_never_cut() -> None:
    name = str(uuid.uuid4())
    rows = [[name, Text("active", "green")], ["x", "[b]no markup[/b]"], ["日本", "wide"]]
    lines = shown(lambda console: render_rows(console, ["instance", "state"], rows)).splitlines()
    assert len(lines) == 4
    assert lines[1] == f"{name}  active"
    assert lines[2] == f"{'x':36}  [b]no markup[/b]"
    assert lines[3] == f"日本{' ' * 32}  wide"


def test_control_characters_stay_out_of_the_terminal() -> None:
    assert printable("a\x1b[31mb\u202e\r\nc") == r"a\x1b[31mb\u202e\r\nc"


def test_a_name_forges_no_row_of_a_listing() -> None:
    forged = "x\n3f2504e0-4f89-41d3-9a0c-0305e82c3301  web-1  m1.small  active"
    lines = shown(lambda console: render_rows(console, ["instance", "state"], [[forged, Text(f"a{forged}")]]))
    assert len(lines.splitlines()) == 2
    funnel = (FunnelStep(step="F\nG", remaining=0, rejected={"a\nb": 1}),)
    failure = Failure(
        instance_uuid="i", flavor="f\nf", state="failed", code="c", reason="r\nr", attempts=1, funnel=funnel
    )
    assert len(shown(lambda console: render_failures([failure], console), width=200).splitlines()) == 2


def test_like_failures_are_listed_once() -> None:
    funnel = (FunnelStep(step="VCPU", remaining=0, rejected={"in use": 3}),)

    def failure(number: int, reason: str, funnel: tuple[FunnelStep, ...] = ()) -> Failure:
        return Failure(
            instance_uuid=f"i{number}", flavor="f", state="failed", code="c", reason=reason, attempts=1, funnel=funnel
        )

    tried = [failure(1, "h1 failed"), failure(2, "h2 failed")]
    nowhere = [failure(3, "no host", funnel), failure(4, "no host", funnel)]
    text = shown(lambda console: render_failures(tried + nowhere, console), width=200)
    assert text.splitlines() == [
        "2 x f c: for example h1 failed (i1, ...)",
        "2 x f c: no host (i3, ...)",
        f"      {'VCPU':36}      0 left   rejected: 3 in use",
    ]


def test_the_scores_of_a_choice_are_listed_by_weigher() -> None:
    scores = (HostScore(host="h1", weights={"ram": 1.0, "cpu": 0.5}), HostScore(host="h\n2", weights={"ram": 0.25}))
    lines = shown(lambda console: render_scores([scores], console), width=80).splitlines()
    assert [line.split() for line in lines] == [
        ["chosen,", "then", "alternates", "score", "ram", "cpu"],
        ["h1", "1.500", "1.000", "0.500"],
        ["h\\n2", "0.250", "0.250", "0.000"],
    ]


def test_stages_are_listed_with_their_milliseconds_and_what_never_happened_is_not() -> None:
    stamps = Stamps(requested=10.0, queued=10.0015, decided=10.002, announced=10.5)
    text = shown(lambda console: render_stages([stamps], console))
    assert text == "stages: queued 1.5 ms, decided 0.5 ms, announced 498.0 ms\n"


def test_one_of_a_thing_is_not_called_several() -> None:
    assert [counted(number, "host") for number in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]


def test_an_explanation_of_several_builds_comes_once() -> None:
    """A gang's refusal had the same sentence on the line of each member."""

    def failed(number: int) -> Track:
        event = BuildEvent(
            instance_uuid=str(uuid.UUID(int=number)),
            project_id="p",
            state=BuildState.FAILED,
            sequence=2,
            code="no_valid_host",
            reason="None of 7 hosts can take it",
            funnel=(FunnelStep(step="providers", remaining=0, rejected={"none": 7}),),
        )
        return Track(event.instance_uuid, "m1.tiny", 0.0, state="failed", last=event)

    lines = shown(lambda console: show_tracks([failed(1), failed(2)], console), width=200).splitlines()
    assert [line for line in lines if "None of 7" in line] == ["2 x None of 7 hosts can take it"]
    assert sum("no_valid_host, explained below" in line for line in lines) == 2
