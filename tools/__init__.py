"""Programs for developers of xlafuse: the sanitizer and the benchmarks. The installed package has none of them."""
