"""A trained network -> what runs on the device: folded, timed, exported, saved."""
