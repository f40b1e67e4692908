"""Steps in, batch manifests out: pure folds and their thin Faust host."""
