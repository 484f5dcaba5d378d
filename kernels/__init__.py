"""Triton kernels, one op a file: kernel, wrapper, torch path. Imported as ``lightning_sparse.kernels``."""

if __name__ != "lightning_sparse.kernels":
    raise ImportError("import these kernels as lightning_sparse.kernels: another project owns the name 'kernels'")
