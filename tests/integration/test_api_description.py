"""The API answers as its description says, to what is right and to what is wrong."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.control import JOB, Bench

EXAMPLES = 10


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_api_answers_as_its_description_says(bench: Bench, mode: GenerationMode) -> None:
    client = bench.client()
    bench.enrol(client, "car-1")
    client.post("/api/v1/jobs", json=JOB)
    # Events would be waited for as long as was asked for.
    schema = schemathesis.openapi.from_asgi("/openapi.json", bench.app)
    operations = [each.ok() for each in schema.exclude(path="/api/v1/events").get_all_operations()]

    for operation in operations:
        if mode is GenerationMode.POSITIVE or operation.body or operation.query:
            converse(operation.as_strategy(generation_mode=mode), dict(client.headers))
    assert len(operations) > 35


def vanishes(value: object) -> bool:
    """Tell whether nothing of a value stands in an address."""
    if isinstance(value, dict):
        value = list(value.values())
    return value is None or (isinstance(value, list) and all(map(vanishes, value)))


def converse(cases: SearchStrategy[Case], headers: dict[str, str]) -> None:
    authorization = {"Authorization": headers["authorization"]}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Case) -> None:
        # A wrong value that no address can carry makes a request that is right.
        assume(not any(map(vanishes, (case.query or {}).values())))
        # What is well formed may still be refused, as a certificate request that is none.
        case.call_and_validate(headers=authorization, excluded_checks=[positive_data_acceptance])

    check()
