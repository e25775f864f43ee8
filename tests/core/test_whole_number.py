import pytest

from lens_core.whole_number import whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), (" 7\n", 7), ("007", 7), (str(2**63 - 1), 2**63 - 1)]
    + [(text, None) for text in ("", "-1", "+1", "1.0", "1_0", "²", "٣", "abc", str(2**63))]
    + [("9" * 5000, None)],
)
def test_a_number_is_ascii_digits_that_fit_an_attribute(text, number):
    assert whole_number(text) == number


def test_what_is_larger_than_allowed_is_no_number():
    assert (whole_number("8", largest=8), whole_number("9", largest=8)) == (8, None)
