"""Tools that an agent loop of this project offers the model: verl's tool interface, and those that are shipped."""
