"""Laws of `basisprune compress --dry-run`."""

from __future__ import annotations

from commands import compress_into


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--dry-run")
    assert result.exit_code == 0, result.output
    for word in (
        "parameters",
        "train: 78 images",
        "lose at most 1 point of accuracy",
        "loss+basis",
        "about 5 candidates, rarely more than ",
        "time ",
        "promise  ",
        "certified",
        "report.html",
    ):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []
