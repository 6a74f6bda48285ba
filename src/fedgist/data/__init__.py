"""Data: the sets (`datasets`), who holds which samples (`partitions`), one client's share (`client_data`)."""
