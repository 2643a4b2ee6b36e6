# SPDX-License-Identifier: Apache-2.0
"""A test that fails: what a red check looks like."""


def test_what_is_wrong_until_it_is_mended() -> None:
    """Fails."""
    raise AssertionError
