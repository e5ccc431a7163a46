"""The families of ops. A module of a per-op table is named after the family whose ops it has.

Five tables have rows for ops, each for another question:

    convert/families/     ATen op → GE ops
    ir/ops/               its inputs, attributes and type rule
    engine/meanings/      what it computes, in PyTorch
    plan/lowerings/       the same as a formula, where there is one
    analysis/padding/     whether its rows stay apart when a size is padded, where that is known

An op is in the same family in all of them (tests/test_families.py), so whoever has found it in one knows where it is in
the others.
"""

FAMILIES = {
    "core": "inputs, constants, results, copies, casts, writes, printing, calls into PyTorch",
    "elementwise": "functions of single elements: arithmetic, comparison, logic, bits, selection, special functions",
    "activations": "activations and their gradients",
    "reductions": "reductions over axes: sums, extremes, means, variances, norms, histograms; softmax",
    "matrices": "products of matrices and vectors, in groups too, and distances between rows",
    "attention": "attention as one op, rotary embeddings",
    "convolutions": "convolutions and their gradients",
    "pooling": "maxima and averages of windows",
    "norms": "normalisations over layers, groups and batches",
    "losses": "losses and their gradients",
    "shapes": "views, slices, joins, windows, diagonals, rolls, and the arithmetic of shapes",
    "indexing": "elements read and written by index or by mask; embeddings",
    "sorting": "sorting, the indices of extremes, scans, search",
    "creation": "tensors made from a size and a few numbers",
    "complex_numbers": "complex numbers and Fourier transforms",
    "random": "random numbers, dropout",
    "resampling": "images resized, sampled, padded and cut into patches",
    "foreach": "ops on lists of tensors, as optimisers use them",
    "symbols": "symbolic numbers: sizes, and the arithmetic Python does with them",
}
