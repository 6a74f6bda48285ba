"""What server and sites say to each other, and what carries it: may touch engines, data, options and core, no runs."""
