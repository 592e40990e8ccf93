"""Programs for developers of xlafuse: sanitizer, benchmarks, checks of prose, tables of docs. The wheel lacks them."""
