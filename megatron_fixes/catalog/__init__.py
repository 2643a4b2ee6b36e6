# SPDX-License-Identifier: Apache-2.0
"""What is known of fixes: patch headers, series, the matrix, fingerprints and verdicts. Pure: files in, facts out."""
