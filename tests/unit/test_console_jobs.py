"""The console's screens of jobs: how a specification is written, and how jobs and versions are laid
out.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetertrain_cloud.console import specification as spec
from hetertrain_cloud.console.curves import ends, is_better_low, lines, step
from hetertrain_cloud.console.job_parts import measured, orders_of
from hetertrain_cloud.console.screens import compare, job, version, versions
from hetertrain_cloud.control.jobs import JobSpecification

OPTIONS = spec.options_of(JobSpecification.model_json_schema())
TASK = "hetertrain_lab.driving:DrivingTask"
words_of = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)
values = st.recursive(
    st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words_of,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words_of, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(OPTIONS)), values, max_size=5))
def test_what_is_written_as_toml_is_read_as_it_was(specification: dict[str, Any]) -> None:
    assert spec.read_toml(spec.write_toml(specification)) == specification


def test_each_option_has_its_place_in_the_form_with_what_it_does_and_its_bounds() -> None:
    placed = {name for _, _, names in spec.SECTIONS for name in names}
    assert placed <= OPTIONS.keys()
    assert all(option.description for option in OPTIONS.values())
    assert OPTIONS["cut_fraction"].bounds == "More than 0, at most 1."
    assert OPTIONS["policy"].choices[0] == "sap"
    assert OPTIONS["task"].is_required
    assert OPTIONS["train_when"].kind == "lines"


def test_what_stands_in_the_fields_is_what_the_api_takes() -> None:
    entries = spec.entries_of({}, OPTIONS) | {
        "task": TASK,
        "eligible_labels": "region=north\nmodel = m3\n",
        "train_when": "Vehicle.Speed < 1\n\n",
        "sync_seconds": "12.5",
        "keep_journal": True,
    }
    found, errors = spec.read_entries(entries, OPTIONS)
    assert not errors
    assert found == {
        "task": TASK,
        "eligible_labels": {"region": "north", "model": "m3"},
        "train_when": ["Vehicle.Speed < 1"],
        "sync_seconds": 12.5,
        "keep_journal": True,
    }
    whole = JobSpecification.model_validate(found).model_dump(mode="json")
    assert spec.without_defaults(whole, OPTIONS) == found
    assert spec.entries_of(found, OPTIONS)["eligible_labels"] == "region=north\nmodel=m3"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("sync_seconds", "soon"),
        ("sync_seconds", "nan"),
        ("max_versions", "1.5"),
        ("eligible_labels", "north"),
        ("task", " "),
    ],
)
def test_an_entry_that_cannot_be_read_is_said_at_its_field(name: str, entry: str) -> None:
    entries = spec.entries_of({"task": TASK}, OPTIONS) | {name: entry}
    _, errors = spec.read_entries(entries, OPTIONS)
    assert list(errors) == [name]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("task = \nseed = 1", "line 1"),
        ('task = "a:B"\nseed = 2020-01-01', "date"),
        ("cut_fraction = nan", "nan"),
        ("a = " + "[" * 5000, "nested"),
        ("#" * 70_000, "characters"),
    ],
)
def test_toml_that_cannot_be_used_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spec.read_toml(text)


def test_a_refusal_of_the_api_is_said_at_the_option_and_its_line() -> None:
    errors = (
        ("body.specification.train_when", "Value error, condition 'x' is malformed"),
        ("body.specification.sync_seconds", "Input should be greater than 0"),
        ("body.name", "String should match pattern '^[a-z]$'"),
    )
    assert spec.refusals(errors) == {
        "train_when": "condition 'x' is malformed",
        "sync_seconds": "more than 0",
        "name": "characters that are not allowed here, or too many",
    }
    text = '# train_when\ntask = "a:B"\ntrain_when = ["x"]\n[eligible_labels]\n'
    assert spec.line_of(text, "train_when") == 3
    assert spec.line_of(text, "eligible_labels") == 4
    assert spec.line_of(text, "seed") is None


@pytest.mark.parametrize(
    ("wanted", "state", "orders"),
    [
        ("running", "running", ("pause", "stop")),
        ("running", "failed", ("start", "pause", "stop")),
        ("running", "completed", ("start",)),
        ("paused", "paused", ("start", "stop")),
        ("stopped", "stopped", ("start",)),
    ],
)
def test_a_job_is_offered_the_orders_that_make_sense(
    wanted: str, state: str, orders: tuple[str, ...]
) -> None:
    assert orders_of({"wanted": wanted, "state": state}) == orders


def test_metrics_are_written_with_the_one_that_tells_most_first() -> None:
    assert measured({"loss": 0.123456, "accuracy": 0.9}) == "accuracy\xa00.9, loss\xa00.1235"
    assert measured({"a": 1.0, "b": 2.0, "c": 3.0}) == "a\xa01, b\xa02, 1\xa0more"
    assert measured(None) == ""
    assert is_better_low("val_loss")
    assert not is_better_low("accuracy")


def test_updates_by_lag_show_each_lag_and_the_tail_together() -> None:
    assert job.by_lag({"0": 5, "2": 1}) == {"0": 5, "1": 0, "2": 1}
    shown = job.by_lag({"1": 2, "40": 3, "99": 4})
    assert shown[f"over {job.LAGS_SHOWN}"] == 7
    assert len(shown) == job.LAGS_SHOWN + 2


def measurement(number: int, **metrics: float) -> dict[str, Any]:
    return {
        "version": number,
        "elapsed_seconds": 2.0 * number,
        "uplink_bytes": None if number < 2 else 100 * number,
        "metrics": metrics,
    }


def test_the_best_job_of_each_metric_stands_first() -> None:
    runs = {
        "one": [measurement(1, loss=0.5, accuracy=0.9), measurement(2, loss=0.6, accuracy=0.8)],
        "two": [measurement(3, loss=0.4, accuracy=0.7)],
    }
    found = [(row["metric"], row["job"]["text"], row["best"]) for row in compare.best_rows(runs)]
    assert found == [
        ("Accuracy, highest", "one", 0.9),
        ("Accuracy, highest", "two", 0.7),
        ("Loss, lowest", "two", 0.4),
        ("Loss, lowest", "one", 0.5),
    ]
    assert compare.curves_of(runs, "loss", "uplink_bytes") == {
        "one": [(200, 0.6)],
        "two": [(300, 0.4)],
    }


def test_a_job_that_has_no_measurement_is_said_to_have_none_beside_one_that_has() -> None:
    runs: dict[str, list[dict[str, Any]]] = {"one": [measurement(1, r2=0.5)], "two": []}
    assert compare.unmeasured(runs) == ("two",)
    assert compare.unmeasured({"two": []}) == ()


@pytest.mark.parametrize(
    ("span", "unit", "apart"),
    [
        (2, "", 1),
        (1589, "", 500),
        (97, "seconds", 20),
        (572, "seconds", 120),
        (11_000, "seconds", 3600),
        (172_800, "seconds", 8 * 3600),
        (40 * 86_400, "seconds", 10 * 86_400),
        (572e6, "bytes", 1e8),
    ],
)
def test_an_axis_is_labelled_at_whole_round_numbers(span: float, unit: str, apart: float) -> None:
    assert step(span, unit) == apart


def test_a_few_values_that_are_far_off_do_not_make_a_flat_line_of_the_others() -> None:
    steady = [(at, 0.9 + 0.1 * at / 100) for at in range(100)]
    begun = [(0, -1.7), (1, 0.2), *steady[2:]]
    assert ends({"r2": steady}) is None
    assert ends({"r2": begun[:19]}) is None, "with few, none is an outlier"
    found = ends({"r2": begun})
    assert found is not None
    assert found["max"] == steady[-1][1]
    assert 0.8 < found["min"] < 0.9
    # Another job's curve is no outlier, however short and far off it is.
    assert ends({"good": begun, "bad": [(at, -1.0) for at in range(3)]}) is None
    assert ends({"r2": [(at, 1.0) for at in range(99)] + [(99, 0.0)]}) is None, "flat anyhow"
    assert ends({"r2": []}) is None


def test_the_last_label_of_an_axis_has_room() -> None:
    axis = lines({"r2": [(17, 0.5), (1589, 0.9)]}, "version")["xAxis"]
    assert (axis["min"], axis["interval"], axis["axisLabel"]["showMaxLabel"]) == (0, 500, False)
    assert lines({"r2": [(500, 0.5), (1000, 0.9)]}, "version")["xAxis"]["axisLabel"]["showMaxLabel"]


@pytest.mark.parametrize(
    ("is_kept", "is_promoted", "number", "without"),
    [
        (True, False, 3, []),
        (True, True, 3, ["promote"]),
        (True, False, 9, ["rollback"]),
        (False, False, 3, ["promote", "rollback"]),
    ],
)
def test_a_version_is_offered_what_its_model_is_there_for(
    is_kept: bool, is_promoted: bool, number: int, without: list[str]
) -> None:
    row = versions.row(
        "driving",
        {
            "version": number,
            "at": None,
            "metrics": None,
            "num_updates": 4,
            "num_nodes": 3,
            "sync": None,
            "lineage": "0123456789abcdef",
            "rolled_back_to": 2,
            "is_kept": is_kept,
            "is_promoted": is_promoted,
        },
        newest=9,
    )
    assert row["without"] == without
    assert bool(row["model"]) is is_kept
    assert "rolled back to 2" in (row["kept"]["text"], row["kept"].get("note"))


def test_contributions_are_shown_by_weight_and_their_share_by_lag() -> None:
    found: list[dict[str, Any]] = [
        {"node": "a", "seq": 1, "base_version": 8, "lag": 0, "examples": 9, "steps": 1},
        {"node": "b", "seq": 1, "base_version": 6, "lag": 2, "examples": 9, "steps": 1},
        {"node": "c", "seq": 1, "base_version": 8, "lag": 0, "examples": 9, "steps": 1},
    ]
    weighed = [each | {"share": share} for each, share in zip(found, (0.2, 0.5, 0.3), strict=True)]
    assert [each["node"] for each in version.by_weight(weighed)] == ["b", "c", "a"]
    assert version.share_by_lag(weighed) == {"0": 50.0, "1": 0.0, "2": 50.0}
    assert version.share_by_lag([each | {"share": None} for each in found]) == {}
    assert version.row(weighed[0])["share"] == {"share": 0.2, "text": "20.0 %"}, "of the whole bar"
