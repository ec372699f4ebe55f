"""Other libraries' networks, each with its own loaders, loss and metric; nothing here is imported unless it is used."""
