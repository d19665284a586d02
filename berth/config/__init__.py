"""The settings of a site, and the addresses, schemas and ports that follow from them."""
