"""OpenStack's services as a client meets them: signing in to Keystone, addresses, microversions, error texts."""
