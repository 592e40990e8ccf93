"""Plans: which cases run, in which timing modes, and how two timings are compared."""
