"""The README's table of photos is what the tests of a budget say."""

from __future__ import annotations

import photo_table


def test_the_table_is_what_the_tool_makes():
    text = photo_table.PAGE.read_text()
    assert text.count("<!-- photos:begin -->") == text.count("<!-- photos:end -->") == 1
    assert photo_table.with_table(text) == text


def test_photos_without_labels_certify_a_little_less_than_labelled_ones():
    for photos in photo_table.PHOTOS:
        assert photo_table.certifiable(photos) < photo_table.unlabelled(photos) < 1.15 * photo_table.certifiable(photos)
