"""Tools on top of everything: planning, benchmarks, profiling, the paper's tables and figures."""
