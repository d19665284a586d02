"""One pass of decisions over the replica: like requests share a ranking, and each choice is assumed."""

from __future__ import annotations

from msgspec.structs import replace

from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.search import options
from scheduler_worker.domain.attempt import Attempt
from scheduler_worker.domain.ranking import Choice, RandomSource, Ranking
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.step import nothing_fits, refused


class DecisionRound:
    """A synchronous pass at one moment: an assumed choice counts as used for every later one.

    subset: how many of the best hosts a choice is drawn from. rankings: those that were made, by the key of
    their requests.
    """

    def __init__(self, selector: Selector, rng: RandomSource, *, subset: int) -> None:
        self._selector = selector
        self._book = selector.book
        self._rng = rng
        self._subset = subset
        self.rankings: dict[tuple[str, ...], Ranking] = {}

    def decide(self, attempt: Attempt) -> Attempt:
        """The attempt with a choice to claim, with a probe to claim, or with what follows when nothing fits."""
        if attempt.chosen_ahead:
            return replace(attempt, chosen_ahead=False)
        try:
            attempt = self.choose(attempt)
            return attempt if attempt.choice is not None else nothing_fits(attempt, self._selector)
        except QueryTooWide as error:  # the traits of a flavor combine in too many ways to search them all
            return refused(attempt, error.code, str(error))

    def choose(self, attempt: Attempt) -> Attempt:
        """The attempt with its choice, assumed; without one when no host fits. Raises QueryTooWide."""
        attempt, choice = self._same_host(attempt)
        if choice is not None:
            self._assume(attempt, choice)
            return replace(attempt, choice=choice)
        ranking = self.rankings.get(attempt.spec.key)
        if ranking is None:
            ranking = self._selector.rank(attempt.spec, self._rng)
            self.rankings[attempt.spec.key] = ranking
        excluded = self._selector.rows_of(attempt.rejected)
        choice = ranking.pick(excluded, subset=self._subset, alternates=attempt.max_alternates)
        if choice is not None:
            self._assume(attempt, choice)
            ranking.consumed(choice.selected)
        return replace(attempt, choice=choice)

    def _same_host(self, attempt: Attempt) -> tuple[Attempt, Choice | None]:
        """The host whose shape had changed, if it still fits as it is now; else it is rejected."""
        host, chosen = attempt.same_host, attempt.choice
        if host is None or chosen is None:
            return replace(attempt, same_host=None) if host is not None else attempt, None
        attempt = replace(attempt, same_host=None)
        row = self._book.row_of(host.uuid)
        limit = self._selector.config.max_options
        found = [] if row is None else options(self._book, attempt.spec.query, row, limit=limit)
        if row is None or not found:
            return replace(attempt, rejected={**attempt.rejected, host.uuid: "claim.raced"}), None
        return attempt, replace(chosen, selected=replace(host, row=row, options=found))

    def _assume(self, attempt: Attempt, choice: Choice) -> None:
        self._book.assume(attempt.request.instance_uuid, choice.selected.options[0].allocations)
