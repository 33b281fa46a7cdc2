"""No text that a test expects is given up silently."""

from __future__ import annotations

from . import files, quotations

RECORDED: dict[str, str] = files.read("error_texts")
CHANGED: dict[str, str] = files.read("changed_texts")


def test_every_recorded_text_is_still_expected_by_a_test() -> None:
    kept = [text for text in RECORDED if text not in CHANGED]
    assert [(text, RECORDED[text]) for text in quotations.missing(kept)] == []


def test_a_changed_text_was_recorded_is_gone_and_has_a_reason() -> None:
    assert CHANGED.keys() <= RECORDED.keys()
    assert quotations.missing(CHANGED) == list(CHANGED)
    assert all(reason.strip() for reason in CHANGED.values())


def test_quotations_are_found_in_every_form() -> None:
    # If none is extracted, nothing is compared when records are written again.
    assert len(quotations.quoted()) > 300
