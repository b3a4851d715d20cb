"""The attention seam: q, k, v caught inside a known site, and the exact strategies that work on them."""
