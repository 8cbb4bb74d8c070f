"""`ringspan fit`: measures this machine and writes what `ringspan simulate` reads (docs/simulator.md)."""
