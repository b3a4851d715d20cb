"""Conformance kit: tiny random models of each family, and proofs that the family records tell the truth."""
