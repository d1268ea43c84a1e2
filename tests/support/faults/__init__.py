"""What goes wrong around a process: disks that refuse, servers that lie."""
