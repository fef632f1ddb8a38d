"""Measuring: lengths, pages, timers and the harness that puts them together. Decides nothing."""
