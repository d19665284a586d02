"""From a claim that holds to what is built: where we asked, or where an earlier run of ours had claimed already."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bus.clock import Clock
from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimOption, ClaimResult
from placement_worker.replica.query import asked_in_all
from scheduler_worker.domain.ranking import Candidate, Choice
from scheduler_worker.domain.selector import Selector, adopted
from scheduler_worker.endings import Ending, Placed, Stranded, Work

log = structlog.get_logger(__name__)


class Adoption:
    """Turns answers of the book into endings."""

    def __init__(self, selector: Selector, clock: Clock) -> None:
        self._selector = selector
        self._book = selector.book
        self._clock = clock

    def claimed(self, work: Work, choice: Choice, answer: ClaimResult) -> Ending:
        """Build where the claim is, which is where we asked unless an earlier run of ours had claimed already."""
        selected = choice.selected
        option = self._option(selected.options, answer)
        if option is None:
            return self.adopt(work, (selected, *choice.alternates), answer)
        if option:
            self._book.assume(work.request.instance_uuid, selected.options[option].allocations)
        self._book.settle(work.request.instance_uuid, answer.generations, answer.sequence)
        return self._placed(
            work,
            self._selector.selection(selected, option),
            choice.alternates,
            answer,
            passed=choice.passed,
            score=selected.score,
        )

    def adopt(self, work: Work, alternates: tuple[Candidate, ...], answer: ClaimResult) -> Ending:
        """A claim that a run before us made, and did not live to write down: the claim is what counts."""
        self._book.settle(work.request.instance_uuid, None)
        main = self._earlier(work, answer)
        if main is None:
            return Stranded("an earlier claim of this request holds a host that no compute service speaks for")
        cell = self._selector.cell_of(main.host_uuid)
        others = [
            alternate
            for alternate in alternates
            if alternate.uuid != main.host_uuid and self._selector.cell_of(alternate.uuid) == cell
        ][: work.most_alternates]
        log.info("claim.adopted", instance=work.request.instance_uuid, host=main.host)
        return self._placed(work, main, others, answer, passed=len(others) + 1, score=0.0)

    def _placed(
        self,
        work: Work,
        main: Selection,
        alternates: Sequence[Candidate],
        answer: ClaimResult,
        *,
        passed: int,
        score: float,
    ) -> Ending:
        cell = self._selector.cell_of(main.host_uuid)
        if cell is None:
            return Stranded("the claimed host's compute service is not known here any more")
        return Placed(
            cell=cell,
            selections=(main, *(self._selector.selection(one) for one in alternates if self._is_still_in(cell, one))),
            consumer_generation=answer.consumer_generation or 0,
            passed=passed,
            score=score,
            claims=work.claims,
            decided_at=work.decided_at,
            claimed_at=self._clock.time(),
            lost=tuple(work.lost),
        )

    def _is_still_in(self, cell: str, alternate: Candidate) -> bool:
        """Whether an alternate may be named: while the claim was under way its host may have left, or changed hands."""
        return self._book.row_of(alternate.uuid) is not None and self._selector.cell_of(alternate.uuid) == cell

    def _option(self, offered: list[ClaimOption], answer: ClaimResult) -> int | None:
        """Which of the offered options is held; None: something that was not offered now."""
        held = set(answer.generations)
        if answer.option is not None and answer.option < len(offered):
            fits = not held or held == set(offered[answer.option].allocations)
            return answer.option if fits else None
        matching = [at for at, option in enumerate(offered) if set(option.allocations) == held]
        return matching[0] if len(matching) == 1 else None

    def _earlier(self, work: Work, answer: ClaimResult) -> Selection | None:
        providers = sorted(answer.generations)
        held = answer.holding or adopted(self._book, asked_in_all(work.spec.query), providers)
        rows = {provider: row for provider in providers if (row := self._book.row_of(provider)) is not None}
        # What shares with the host is no host: of the trees that give something, only the host's is in the table.
        roots = dict.fromkeys(self._book.uuid_of(self._book.root_of(row)) for row in rows.values())
        hosts = [root for root in roots if self._selector.table.index_of(root) is not None]
        if held is None or len(hosts) != 1:
            return None
        host_uuid = hosts[0]
        shapes = {provider: self._book.shape_of(row) for provider, row in rows.items()}
        return self._selector.placed(host_uuid, held, shapes)
