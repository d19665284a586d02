"""Records of load runs that never were: any number of boots, drawn from a seed."""

from __future__ import annotations

import numpy as np

from berth.load.record import (
    OUTCOMES,
    STAGES,
    LoadRecord,
    LoadSettings,
    MachineInfo,
    Operations,
    Samples,
    Totals,
    Utilisation,
)

ACTIVE, FAILED, LOST = (OUTCOMES.index(name) for name in ("active", "failed", "lost"))
SHARES = (0.25, 0.05, 0.1, 0.2, 0.1, 0.3)


def made_up(boots: int, *, seed: int = 1, hosts: int = 40, slower: float = 1.0, name: str = "m1.small") -> LoadRecord:
    """A run at about 1,000 boots a second; one boot in fifty fails, none is lost. `name`: what everything is called."""
    rng = np.random.default_rng(seed)
    intended = np.arange(boots) / 1000
    latency = slower * (0.02 + rng.gamma(2.0, 0.02, boots))
    stages = {s: (latency * share).round(6).tolist() for s, share in zip(STAGES, SHARES, strict=True)}
    outcome = np.where(np.arange(boots) % 50 == 49, FAILED, ACTIVE)
    failed = int((outcome == FAILED).sum())
    rows = Operations(
        flavors=[name, f"{name}.metal"],
        kinds=["vm", "metal"],
        codes=["", f"{name}.code"],
        cells=["", f"{name}-cell1", f"{name}-cell2"],
        hosts=["", f"{name}-host"],
        instance_uuid=[f"00000000-0000-4000-8000-{number:012d}" for number in range(boots)],
        intended_s=intended.tolist(),
        sent_s=(intended + 0.001).tolist(),
        accepted_s=(intended + 0.005).tolist(),
        ended_s=(intended + latency).tolist(),
        outcome=outcome.tolist(),
        flavor=(np.arange(boots) % 10 == 0).astype(int).tolist(),
        code=(outcome == FAILED).astype(int).tolist(),
        cell=[1] * boots,
        host=[1] * boots,
        attempts=[1] * boots,
        conflicts=[None] * boots,
        again=[0] * boots,
        stages=stages,
    )
    seconds = boots / 1000 + 0.1 if boots else 0.0
    return LoadRecord(
        settings=LoadSettings(mode="open", boots=boots, mix={name: 9.0, f"{name}.metal": 1.0}, rate_per_s=1000.0),
        totals=Totals(
            boots=boots,
            accepted=boots,
            outcomes={"active": boots - failed, "failed": failed},
            by_code={f"{name}.code": failed} if failed else {},
            seconds=seconds,
            boots_per_s=(boots - failed) / seconds if seconds else 0.0,
            conflicts=3 * boots // 100,
        ),
        started_at=1_800_000_000.0,
        seconds=seconds,
        machine=MachineInfo(hostname=name, cpus=2, python="3.11.2"),
        boots=rows,
        samples=_samples(boots, seconds, name, rng) if boots else Samples(),
        utilisation=_heat(hosts, seconds, name, rng) if boots else Utilisation(),
    )


def _samples(boots: int, seconds: float, name: str, rng: np.random.Generator) -> Samples:
    at = np.arange(0.0, seconds + 0.5, 0.5)
    share = np.minimum(at / seconds, 1.0)
    size = len(at)
    return Samples(
        at_s=at.tolist(),
        offered_per_s=[1000.0] * size,
        sent_per_s=[1000.0] * size,
        ended_per_s=[1000.0] * size,
        deleted_per_s=[0.0] * size,
        in_flight=[60] * size,
        p50_ms=[50.0] * size,
        p95_ms=[90.0] * size,
        p99_ms=[None] * size,
        conflicts=(share * 0.03 * boots).astype(int).tolist(),
        retries=(share * 0.01 * boots).astype(int).tolist(),
        backpressure=[0] * size,
        depths={f"{name}.queue{number}": rng.integers(0, 10 + 30 * number, size).tolist() for number in range(12)},
    )


def _heat(hosts: int, seconds: float, name: str, rng: np.random.Generator) -> Utilisation:
    at = np.linspace(0.0, seconds, 12)
    most = rng.uniform(0.3, 1.0, hosts)
    return Utilisation(
        hosts=[f"{name}-host{number:05d}" for number in range(hosts)],
        cells=[f"{name}-cell{1 + number % 2}" for number in range(hosts)],
        of_hosts=hosts,
        at_s=at.tolist(),
        share=[(most * moment / max(seconds, 1e-9)).round(3).tolist() for moment in at],
    )
