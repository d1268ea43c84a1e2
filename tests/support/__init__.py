"""What several tests share: records, servers, runs and processes made for them."""
