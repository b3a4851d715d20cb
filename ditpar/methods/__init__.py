"""One file per parallel method. A method wraps the root call of a transformer: arguments in, one tensor out."""
