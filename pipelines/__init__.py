"""One small file of facts per model family. They import nothing but ditpar.family."""
