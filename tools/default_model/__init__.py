"""The recipe of the bundled model, stage by stage; ../train_default_model.py runs it."""
