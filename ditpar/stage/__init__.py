"""Stage pipelines: a model cut into stages that pass units of work along a ring of ranks. Knows no model."""
