"""tgis.frontend.admission: limits in total and for each client."""

import pytest

from tgis.errors import Overloaded
from tgis.frontend.admission import Quota


def refusal(quota: Quota, client: bytes, amount: int) -> str:
    with pytest.raises(Overloaded) as caught, quota.hold(client, amount):
        pass
    return caught.value.reason


def test_quotas_are_limited_in_total_and_for_each_client() -> None:
    quota = Quota("inputs", limit=5, per_client=3)
    assert (quota.most(b"a"), quota.most(b"")) == (3, 5)
    with quota.hold(b"a", 2), quota.hold(b"", 1):
        assert refusal(quota, b"a", 2) == "2 inputs of this client, at most 3 allowed"
        assert refusal(quota, b"b", 3) == "3 inputs, at most 5 allowed"
        with quota.hold(b"b", 2):
            assert quota.total == 5
    with quota.hold(b"", 5):  # a client without a name has no limit but the total
        assert quota.total == 5
    assert quota.total == 0
