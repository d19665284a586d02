"""The record of a load run: written, read again, and refused when it is not one."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from berth.load.record import (
    FORMAT,
    LoadRecord,
    LoadSettings,
    Operations,
    RecordError,
    Samples,
    Totals,
    Utilisation,
    decode,
    encode,
)


def a_record() -> LoadRecord:
    boots = Operations(
        flavors=["m1.tiny"], kinds=["vm"], codes=["", "no_hosts"], cells=["", "cell1"], hosts=["", "h1"],
        instance_uuid=["a", "b"], intended_s=[0.0, 0.1], sent_s=[0.01, None], accepted_s=[0.02, None],
        ended_s=[0.5, None], outcome=[0, 5], flavor=[0, 0], code=[0, 1], cell=[1, 0], host=[1, 0], attempts=[1, 0],
        conflicts=[0, None], again=[0, 3], stages={"queued": [0.1, None]},
    )  # fmt: skip
    samples = Samples(
        at_s=[0.5], offered_per_s=[4.0], sent_per_s=[2.0], ended_per_s=[2.0], deleted_per_s=[0.0], in_flight=[0],
        p50_ms=[500.0], p95_ms=[500.0], p99_ms=[None], conflicts=[None], retries=[0], backpressure=[3],
        depths={"scheduler.requests": [7]},
    )  # fmt: skip
    heat = Utilisation(hosts=["h1"], cells=["cell1"], of_hosts=1, at_s=[0.5], share=[[0.25]])
    settings = LoadSettings(mode="open", boots=2, rate_per_s=10.0)
    return LoadRecord(settings=settings, totals=Totals(boots=2), boots=boots, samples=samples, utilisation=heat)


def test_a_record_is_read_as_it_was_written() -> None:
    record = a_record()
    assert decode(encode(record)) == record
    assert record.boots.latency_s(0) == 0.5 and record.boots.latency_s(1) is None
    assert [record.boots.outcome_of(row) for row in range(2)] == ["active", "unsent"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "record.unreadable"),
        (b"[" * 100_000, "record.unreadable"),
        (b"{}", "record.unreadable"),
        (encode(replace(a_record(), format="berth.load.v9")), "record.format"),
        (encode(a_record()).replace(b'"outcome":[0,5]', b'"outcome":[0,99]'), "record.invalid"),
        (encode(a_record()).replace(b'"outcome":[0,5]', b'"outcome":[0]'), "record.invalid"),
        (encode(a_record()).replace(b'"queued":[0.1,null]', b'"queued":[0.1]'), "record.invalid"),
        (encode(a_record()).replace(b'"scheduler.requests":[7]', b'"scheduler.requests":[]'), "record.invalid"),
        (encode(a_record()).replace(b'"share":[[0.25]]', b'"share":[[]]'), "record.invalid"),
        (encode(a_record()).replace(b'"share":[[0.25]]', b'"share":[]'), "record.invalid"),
    ],
)
def test_what_is_not_a_record_is_refused_with_a_code(body: bytes, code: str) -> None:
    with pytest.raises(RecordError) as fault:
        decode(body)
    assert fault.value.code == code


def test_a_field_of_a_newer_record_is_passed_over() -> None:
    plain = msgspec.json.decode(encode(a_record()))
    assert decode(msgspec.json.encode({**plain, "weather": "fine"})).format == FORMAT
