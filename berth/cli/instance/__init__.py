"""Commands about instances: build and delete them, show and list them, move and change them."""
