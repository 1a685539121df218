// What metal-cpp takes from Apple's IOSurface; see CoreFoundation.h beside.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
