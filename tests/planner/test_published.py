"""Published figures: predictions keep to what their rows promise, and the fit gives the committed constants."""

import pytest

from fla_npu.planner import cost, published
from fla_npu.planner.cost import MACHINE, Machine
from fla_npu.planner.published import ABLATION, Row, ablation, calibrate, rows, table

ROWS = rows()


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.within is not None], ids=lambda row: f"{row.group}: {row.what}"
)
def test_predictions_keep_to_their_bounds(row: Row) -> None:
    assert row.within is not None
    assert abs(row.error) <= row.within, (row.predict(), row.published)


def test_two_thirds_of_times_are_within_a_fifth() -> None:
    """The goal for latencies and speeds that nothing was fitted on."""
    times = [row for row in ROWS if row.basis == "predicted" and row.group.startswith(("Latency", "Speed"))]
    close = [row for row in times if abs(row.error) <= 0.2]
    assert len(times) == 32
    assert len(close) >= 23, [f"{row.group}: {row.what} {row.error:+.2f}" for row in times if row not in close]


def test_the_fit_gives_the_committed_constants() -> None:
    found = calibrate()
    for name in ("operator", "item", "launch"):
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=0.01), name


def test_the_fit_uses_gdn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(published, "ablation", lambda op, machine: asked.append(op) or ABLATION["gdn"])
    monkeypatch.setattr(published, "_call", lambda op, *rest, machine: asked.append(op) or published.cost(
        "gdn", "head", chip=published.chip("310P"), lengths=(64,), heads=1
    ))  # fmt: skip
    calibrate()
    assert set(asked) == {"gdn"}


def test_what_is_counted_rests_on_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [row for row in ROWS if row.basis == "counted"]
    before = [row.predict() for row in counted]
    monkeypatch.setattr(cost, "WARMUP", 10)
    monkeypatch.setattr(published, "_call", published._call.__wrapped__)
    machine = Machine(operator=1e-5, item=1e-3, launch=1e-3)
    monkeypatch.setattr(published, "MACHINE", machine)
    monkeypatch.setattr(cost, "machine_of", lambda chip: machine)
    assert [row.predict() for row in counted] == before


def test_planning_alone_explains_the_order_of_the_ablation() -> None:
    for op in ABLATION:
        assert list(ablation(op)) == sorted(ablation(op), reverse=True)


def test_rows_are_named_once_and_notes_belong_to_groups() -> None:
    names = [(row.group, row.what) for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(published.NOTES) <= {row.group for row in ROWS}


def test_table_has_every_row() -> None:
    lines = table().splitlines()
    assert sum(line.startswith("| ") and "| what |" not in line for line in lines) == len(ROWS)
    assert table() == table()
