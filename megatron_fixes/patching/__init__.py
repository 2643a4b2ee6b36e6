# SPDX-License-Identifier: Apache-2.0
"""Finds a target, plans in memory, applies and reverts patches with a journal. Pure: no torch, no megatron."""
