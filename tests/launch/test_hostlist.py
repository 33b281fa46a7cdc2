from __future__ import annotations

import pytest

from shoal.launch.environment import counts, first_host


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n01", "n01"),
        ("n[01-04,07],m3", "n01"),
        ("m3,n[01-04]", "m3"),
        ("rack[2,5]-n[003-128].cluster.example", "rack2-n003.cluster.example"),
        ("gpu-a-17", "gpu-a-17"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[01-04", ",n1"])
def test_a_list_without_a_host_is_refused(nodelist):
    with pytest.raises(ValueError, match="no list of hosts"):
        first_host(nodelist)


@pytest.mark.parametrize(
    ("text", "found"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,8(x2)", [1, 8, 8])]
)
def test_counts_are_unfolded(text, found):
    assert counts(text) == found


@pytest.mark.parametrize("text", ["", "2(x)", "two", "2(x3"])
def test_other_text_is_no_list_of_counts(text):
    with pytest.raises(ValueError, match="no list of counts"):
        counts(text)
