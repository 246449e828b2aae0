from collections.abc import Callable

import pytest

from tests.contracts.matrix import Case, blueprint_cases
from tests.contracts.rules import RULES


@pytest.mark.parametrize("case", blueprint_cases())
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_blueprint(rule: Callable[[Case], None], case: Case) -> None:
    rule(case)
