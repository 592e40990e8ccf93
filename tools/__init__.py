"""Programs for developers of xlafuse: the sanitizer and the benchmarks. The installed package does not contain them."""
