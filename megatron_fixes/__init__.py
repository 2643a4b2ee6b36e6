# SPDX-License-Identifier: Apache-2.0
"""Mends known defects of released Megatron-LM.

Importing this package imports neither torch nor megatron and changes nothing.
"""

__version__ = "0.1.0"
