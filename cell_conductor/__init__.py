"""cell_conductor: builds inside one cell; speaks on that cell's bus only."""
