"""What `make demo` and `make serve` run; not part of the installed package."""
