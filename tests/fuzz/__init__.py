"""Harnesses for a fuzzer; not collected by pytest."""
