"""Read by pytest before any test imports torch: see common.wait_gently."""

import common

common.wait_gently()
