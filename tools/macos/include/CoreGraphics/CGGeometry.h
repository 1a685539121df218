// What metal-cpp takes from Apple's CoreGraphics; see CoreFoundation.h beside.
#pragma once

typedef struct CGSize {
  double width;
  double height;
} CGSize;
